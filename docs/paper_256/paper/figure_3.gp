load 'style.gp'
set title 'Figure 3. How large must a logit be? z = (0, 1/(n-2), ..., 1, z_{max})'
set xlabel 'z_{max}'
set ylabel 'probability of z_{max}'
set yrange [0:1.05]
@below
plot for [i = 2:10] name.'.csv' using 1:i with lines linewidth 2 dashtype 1 + (i - 2) % 3 \
     linecolor rgb colour[1 + (i - 2) / 3] title columnheader(i)
