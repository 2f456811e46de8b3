load 'style.gp'
set title 'Figure 4. Training loss of text, mean over the seeds'
set xlabel 'tokens (millions)'
set ylabel 'loss (nats a token)'
@below
# (e) has learnt what (a) has. Without the first points, which would flatten the rest.
plot for [i in '1 2 3 4 6'] name.'.csv' every ::4 using ($1 / 1e6):(column(i + 1)) with lines linewidth 2 \
     linecolor rgb colour[i + 0] dashtype 1 + (i > 4) title configuration[i + 0]
