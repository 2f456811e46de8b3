load 'style.gp'
set title 'Figure 2. The multiplier that is learnt for every size'
set xlabel 'n, the number of keys'
set ylabel 'p_n'
set logscale x 2
set key left top
plot name.'.csv' using 1:2 with points pointtype 7 pointsize 0.6 linecolor rgb colour[1] title 'learnt p_n', \
     '' using 1:3 with lines linewidth 2 linecolor rgb colour[2] \
     title sprintf('%.3f ln n + %.3f,  R^2 = %.3f', slope, intercept, r2)
