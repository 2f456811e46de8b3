load 'style.gp'
set title sprintf('Figure 5. Loss at each position, RoPE θ × %g, no retraining', theta_factor)
set xlabel 'position'
set ylabel 'loss (nats a token)'
set logscale x 2
set arrow from trained, graph 0 to trained, graph 1 nohead dashtype 3 linecolor rgb '#404040'
set label 'trained length' at trained, graph 0.96 right offset -1, 0
@below
plot for [i = 1:6] name.'.csv' using 1:(column(i + 1)) with lines linewidth 2 linecolor rgb colour[i] \
     dashtype 1 + (i > 4) title columnheader(i + 1)
