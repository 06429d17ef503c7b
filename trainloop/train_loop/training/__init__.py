"""Training in one rank: steps, gradients, and what a user is warned of."""
