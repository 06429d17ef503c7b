"""A predictor over a table: five kinds of models under one quota, on scikit-learn's breast-cancer data.

python examples/tabular_predictor.py
"""

import argparse

from sklearn.datasets import load_breast_cancer

from trainloop.tabular import TabularPredictor

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["LR", "RF", "XT", "GBM", "NN_TORCH"])
    parser.add_argument("--folds", type=int, default=0, help="2 or more: each model is a bag")
    args = parser.parse_args()

    table = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "class"})
    test_data = table.sample(frac=0.25, random_state=0)
    train_data = table.drop(test_data.index)

    predictor = TabularPredictor(label="class", eval_metric="roc_auc").fit(
        train_data, hyperparameters={name: {} for name in args.models}, num_bag_folds=args.folds, num_gpus=0
    )
    print(predictor.leaderboard(test_data).to_string(index=False))
    print(predictor.feature_importance(test_data, num_shuffle_sets=2).head(3))
    accuracy = predictor.evaluate(test_data)["accuracy"]
    print(
        f"right on {100 * accuracy:.1f}% of {len(test_data)} held-out patients; saved to {predictor.save('predictor')}"
    )
