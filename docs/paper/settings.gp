# Written with the figures' numbers.
trained = 128
depths = 5
theta_factor = 50
scored_context = 8
slope = 0.0939155
intercept = 0.547597
r2 = 0.894431
