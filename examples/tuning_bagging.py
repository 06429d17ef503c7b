"""Trials of bagged models under resource quotas: a TTModel and LightGBM side by side, 2 trials of 2 folds.

AutoGluon's documented example, on scikit-learn's breast-cancer data: of 32 CPUs and 4 GPUs, each trial gets 10 CPUs and
2 GPUs, and each model gets 4 CPUs and 0.5 GPUs. Here they get the same fractions of this machine's resources.

python examples/tuning_bagging.py
"""

import argparse

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn, optim
from torch.utils.data import DataLoader, Subset, TensorDataset

from trainloop import TrainLoop, TTBasicModel
from trainloop.resources import ResourceQuota, available, gpu_or_cpu, plan
from trainloop.tuning import EstimatorLoop, tune

SEARCH = {"num_trials": 2, "num_bag_folds": 2}
DOCUMENTED = {"per_bag": ResourceQuota(10, 2), "per_model": ResourceQuota(4, 0.5)}

table, labels = load_breast_cancer(return_X_y=True)
x_train, x_test, y_train, y_test = train_test_split(table, labels, test_size=0.25, random_state=0, stratify=labels)
scaler = StandardScaler().fit(x_train)
x_train, x_test = scaler.transform(x_train), scaler.transform(x_test)


class Net(TTBasicModel):
    """Two layers that predict the probabilities of both classes."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(30, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)

    def get_predictions(self, batch_data, device):
        x, y = batch_data
        return self(x).softmax(1), y, {}


def dataset(x, y):
    return TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))


def make_loop(params, fold):
    """Make the loop that one fold trains; runs in the fold's own process, on its own CPUs and GPUs."""
    if params["kind"] == "TTModel":
        data = dataset(x_train, y_train)
        model = Net(width=64)
        return TrainLoop(
            model,
            DataLoader(Subset(data, fold.train), batch_size=32, shuffle=True),
            DataLoader(Subset(data, fold.validation), batch_size=64),
            optimizer=optim.Adam(model.parameters(), lr=1e-3),
            criterion=nn.CrossEntropyLoss(),
            progress_bar=False,
        )
    rows = ((x_train[fold.train], y_train[fold.train]), (x_train[fold.validation], y_train[fold.validation]))
    return EstimatorLoop(boosted_trees(), *rows, fit=fit_trees)


def boosted_trees():
    try:
        from lightgbm import LGBMClassifier
    except (ImportError, OSError):  # not installed, or without the system's OpenMP
        from sklearn.ensemble import HistGradientBoostingClassifier

        print("LightGBM is not installed; scikit-learn's histogram boosting takes its place.")
        return HistGradientBoostingClassifier(max_iter=100)
    return LGBMClassifier(n_estimators=100, verbose=-1)


def fit_trees(trees, x, y, num_epochs=None):
    """Train on the GPU if LightGBM was built for one, else on the CPU, with one warning."""
    if torch.cuda.is_available() and "device" in trees.get_params():
        return gpu_or_cpu(
            lambda: trees.set_params(device="gpu").fit(x, y), lambda: trees.set_params(device="cpu").fit(x, y)
        )
    return trees.fit(x, y)


def scaled_to(machine):
    """The documented fractions of 32 CPUs and 4 GPUs, applied to this machine."""
    cpus, gpus = machine.num_cpus, machine.num_gpus
    bag = ResourceQuota(max(1, 10 * cpus // 32), 2 * gpus / 4)
    return {"per_bag": bag, "per_model": ResourceQuota(max(1, 4 * cpus // 32), min(1, 0.5 * gpus / 4))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    args = parser.parse_args()

    print("With 32 CPUs and 4 GPUs:", plan(ResourceQuota(32, 4), **SEARCH, **DOCUMENTED), sep="\n")
    machine = available()
    print("\nThis machine:", machine, "", plan(machine, **SEARCH, **scaled_to(machine)), "", sep="\n")

    result = tune(
        make_loop,
        {"kind": ["TTModel", "LightGBM"]},
        searcher="grid",
        **SEARCH,
        **scaled_to(machine),
        targets=y_train,  # classes: the folds are stratified
        fit_args={"num_epochs": args.epochs},
        seed=0,
    )
    print(result)
    print("out-of-fold log loss of the best:", round(log_loss(y_train, result.out_of_fold_predictions), 4))

    result.predictor.save("bag.pkl")
    x_new = dataset(x_test, y_test) if result.best_params["kind"] == "TTModel" else x_test
    accuracy = accuracy_score(y_test, result.predict(x_new).argmax(1))
    print(f"the best, {result.best_params['kind']}, is right on {100 * accuracy:.1f}% of {len(y_test)} held-out rows")
