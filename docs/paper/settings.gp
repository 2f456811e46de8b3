# Written with the figures' numbers.
trained = 128
depths = 5
theta_factor = 50
scored_context = 8
slope = 0.124631
intercept = 0.452466
r2 = 0.948267
