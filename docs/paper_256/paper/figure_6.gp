load 'style.gp'
set palette defined (0 '#b2182b', 0.5 '#fddbc7', 0.75 '#d1e5f0', 1 '#2166ac')
set cbrange [0:1]
set cblabel 'needles found'
unset grid
unset key
set border 15
set xlabel 'context / trained length'
set ylabel 'depth'
set yrange [1 + 0.5 / (depths - 1) : -0.5 / (depths - 1)]
set ytics 0.5
set xtics font ',11'
set multiplot layout 2,3 title 'Figure 6. A needle in a haystack: how often all digits are right, extended to θ × '.sprintf('%g', theta_factor) font ',15'
do for [i = 1:6] {
  set title configuration[i]
  # Contexts stand side by side, whatever their lengths.
  plot name.'.csv' every ::1 using (floor($0 / depths)):2:(column(i + 2)):xtic(sprintf('%g', $1 / trained)) with image
}
unset multiplot
