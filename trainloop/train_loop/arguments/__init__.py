"""What was asked: check the arguments of ``TrainLoop`` and ``fit``, and find the devices of a run."""
