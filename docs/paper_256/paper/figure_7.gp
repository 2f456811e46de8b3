load 'style.gp'
set title sprintf('Figure 7. Needle scores of heads, context %d × trained', scored_context)
set xlabel 'head, by its score'
set ylabel 'needle score'
@below
set yrange [0:1.05]
set xtics 1
plot for [i = 1:6] name.'.csv' using 1:(column(i + 1)) with linespoints linewidth 2 pointtype 7 pointsize 0.7 \
     linecolor rgb colour[i] dashtype 1 + (i > 4) title columnheader(i + 1)
