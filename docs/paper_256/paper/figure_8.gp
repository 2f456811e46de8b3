load 'style.gp'
set xlabel 'trial, by its score'
set ylabel 'best needle score'
set yrange [0:1.05]
set key left bottom font ',11'
set xrange [0:100]
set xtics 25
set multiplot layout 2,3 title 'Figure 8. The best head of every trial, and what became of the answer' font ',15'
scored(i, least, most) = column(2 * i + 1) >= least && column(2 * i + 1) <= most ? column(2 * i) : NaN
do for [i = 1:6] {
  set title configuration[i]
  if (i == 2) { unset key }
  plot name.'.csv' every ::1 using 1:(scored(i, 7, 7)) with points pointtype 7 linecolor rgb '#2166ac' title 'all digits right', \
       '' every ::1 using 1:(scored(i, 1, 6)) with points pointtype 9 linecolor rgb '#e69f00' title 'first digit right', \
       '' every ::1 using 1:(scored(i, 0, 0)) with points pointtype 2 linecolor rgb '#b2182b' title 'wrong'
}
unset multiplot
