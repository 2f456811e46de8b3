# Written with the figures' numbers.
trained = 256
depths = 5
theta_factor = 50
scored_context = 8
slope = 0.0766603
intercept = 0.367188
r2 = 0.835551
