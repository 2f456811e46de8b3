load 'style.gp'
set title 'Figure 1. Attention fading: z = (-2, ..., -2, +3)'
set xlabel 'n, the number of logits'
set ylabel 'largest probability'
set logscale x
set format x '10^{%T}'
set yrange [0:1.05]
set key right center
plot name.'.csv' using 1:2 with linespoints linewidth 2 pointtype 7 linecolor rgb colour[1] title 'Softmax', \
     '' using 1:3 with linespoints linewidth 2 pointtype 5 linecolor rgb colour[2] title 'SSMax, s = 0.43'
