"""What training and evaluation read: the steps of an epoch, and the batches of an evaluation."""
