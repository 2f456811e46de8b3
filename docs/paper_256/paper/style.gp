# What all figures share. To draw one: gnuplot -e "format = 'png'; name = 'figure_1'" figure_1.gp
set encoding utf8
load 'settings.gp'
wide = (name eq 'figure_6' || name eq 'figure_8') ? 1100 : 900
high = wide == 1100 ? 640 : 560
if (format eq 'png') { set terminal pngcairo size wide,high font 'Sans,13' } \
else { set terminal svg size wide,high font 'Sans,13' background rgb 'white' }
set output name.'.'.format
set datafile separator ','
set grid linecolor rgb '#d8d8d8' linetype 1
set border 3
set tics nomirror
set key right top Left reverse samplen 2
# (a) to (f), safe for the colour-blind
array colour[6] = ['#1f5fbf', '#d62728', '#e69f00', '#8c564b', '#7f7f7f', '#009e73']
below = "set key outside bottom center horizontal maxrows 3 Left reverse"
array configuration[6] = ['(a) Softmax', '(b) SSMax', '(c) SSMax without s', '(d) SSMax with b', \
                          '(e) replaced after training', '(f) switched in training']
