"""Names of the solvers that samplers.py has, for the nodes' drop-down; standard library only."""

SOLVERS = ("euler", "euler_ancestral", "heun", "dpmpp_2m", "ddim", "lcm")
