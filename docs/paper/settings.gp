# Written with the figures' numbers.
trained = 128
depths = 5
theta_factor = 50
scored_context = 8
slope = 0.100453
intercept = 0.532194
r2 = 0.923879
