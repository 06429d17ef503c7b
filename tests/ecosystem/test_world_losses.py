"""Losses and models of odd shapes: graphs, contrastive over all ranks, several forwards, unused parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from world import Entry, Items, Parts, in_all_modes, loaders, plain, randint, randn

from trainloop import TTBasicModel, TTModel
from trainloop.distributed import all_gather

TRAIN, HELD_OUT = 37, 11


# -- gcn and gat: one full graph ---------------------------------------------------------------------------------------


class FullGraph(TTModel):
    """Two attention layers over one graph; the loader's one batch is the graph, whatever the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)
        self.attend = nn.Parameter(torch.randn(8, 1))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = self.lin1(x)
        scores = F.leaky_relu(h @ self.attend + (h @ self.attend).T).masked_fill(adjacency == 0, float("-inf"))
        h = F.dropout(scores.softmax(1), 0.1, self.training and self.droops) @ h
        return (adjacency / adjacency.sum(1, keepdim=True)) @ self.lin2(F.elu(h))

    droops = False  # random numbers would be other ones in ddp

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, adjacency, y, mask = batch_data
        return criterion(self(x, adjacency)[mask], y[mask])

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        x, adjacency, y, _ = batch_data
        return self(x, adjacency), y, {}


def make_full_graph(batch: int, shuffle: bool) -> Parts:
    model = FullGraph().double()
    adjacency = ((randn(20, 20) + torch.eye(20) * 9) > 0.5).double()
    graph = (randn(20, 6), adjacency, randint(3, 20), torch.arange(20) < 12)
    return Parts(
        model,
        DataLoader(Items([graph]), batch_size=None),
        optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4),
        DataLoader(Items([graph]), batch_size=None),
        nn.CrossEntropyLoss(),
    )


def full_graph_loss(model: Any, batch: Any) -> Tensor:
    x, adjacency, y, mask = batch
    return F.cross_entropy(model(x, adjacency)[mask], y[mask])


# -- contrastive, over the embeddings of all ranks ---------------------------------------------------------------------


class Contrastive(TTModel):
    """CLIP's loss: each pair against all other pairs of the global batch, with gradients through all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(image)), F.normalize(self.text(text))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Any:
        image, text = self(*batch_data)
        # The loss is that of the global batch on each rank: the mean over ranks is the same loss.
        return clip_loss(together(image), together(text), self.logit_scale)

    def get_loss_eval(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        return clip_loss(*self(*batch_data), self.logit_scale)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        image, text = self(*batch_data)
        return (image * text).sum(1), batch_data[0], {}


def together(embeddings: Tensor) -> Tensor:
    return all_gather(embeddings, concat=True)


def clip_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits = scale.exp() * image @ text.T
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def make_contrastive(batch: int, shuffle: bool) -> Parts:
    """The last batch is uneven: one rank has more pairs than the other."""
    model = Contrastive().double()
    train = TensorDataset(randn(TRAIN, 6), randn(TRAIN, 5, seed=1))
    return Parts(
        model,
        DataLoader(train, batch, shuffle=shuffle),
        optim.Adam(model.parameters(), lr=0.01),
    )


# -- several forwards, unused parameters, nested tensors ---------------------------------------------------------------


class Consistency(TTBasicModel):
    """FixMatch: the weak view's prediction, without gradients, is the strong view's target; and a side head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.side = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        x, y = batch_data
        with torch.no_grad():
            target = self(x).softmax(1)
        strong = F.cross_entropy(self(0.5 * x), target)
        return criterion(self(x), y) + strong + 0.1 * criterion(self.side(self.body(x)), y)


def classified(model: Any, batch: int, shuffle: bool, make_optimizer: Any = optim.Adam) -> Parts:
    train, held_out = (TensorDataset(randn(n, 6, seed=n), randint(3, n, seed=n)) for n in (TRAIN, HELD_OUT))
    return Parts(
        model,
        optimizer=make_optimizer(model.parameters(), lr=0.01),
        criterion=nn.CrossEntropyLoss(),
        **loaders(train, held_out, batch, shuffle),
    )


def make_consistency(batch: int, shuffle: bool) -> Parts:
    return classified(Consistency().double(), batch, shuffle)


def consistency_loss(model: Any, batch: Any) -> Tensor:
    x, y = batch
    target = model(x).softmax(1).detach()
    strong = F.cross_entropy(model(0.5 * x), target)
    return F.cross_entropy(model(x), y) + strong + 0.1 * F.cross_entropy(model.side(model.body(x)), y)


class LayerDrop(TTBasicModel):
    """A branch that some steps leave out, and one that none takes: Adam must not move what has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.never = nn.Linear(8, 8)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.body(x))
        if self.training:
            self.step += 1
        return self.head(self.branch(h) if self.step % 3 else h)


def make_layer_drop(batch: int, shuffle: bool) -> Parts:
    return classified(LayerDrop().double(), batch, shuffle)


class Ragged(TTBasicModel):
    """Sequences of any length as a nested tensor, made in the model from what the collator left a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, sequences: list[Tensor]) -> Tensor:
        nested = torch.nested.nested_tensor(sequences, layout=torch.jagged)
        hidden = self.embed(nested).relu()
        return self.head(torch.stack([part.mean(0) for part in hidden.unbind()]))


def as_lists(rows: list[tuple[Tensor, int]]) -> tuple[list[Tensor], Tensor]:
    return [x for x, _ in rows], torch.tensor([y for _, y in rows])


def make_ragged(batch: int, shuffle: bool) -> Parts:
    model = Ragged().double()
    train, held_out = (Items([(randn(2 + i % 4, 4, seed=i), i % 3) for i in range(n)]) for n in (TRAIN, HELD_OUT))
    return Parts(
        model,
        optimizer=optim.Adam(model.parameters(), lr=0.01),
        criterion=nn.CrossEntropyLoss(),
        **loaders(train, held_out, batch, shuffle, collate_fn=as_lists),
    )


# -- actor-critic: the loader is an environment ------------------------------------------------------------------------


class Episodes(IterableDataset[Any]):
    """Episodes of a task in which the state says which of two actions is rewarded."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for episode in range(6):
            state = randn(5, 4, seed=episode)
            action = randint(2, 5, seed=episode)
            yield state, action, torch.where((state.sum(1) > 0) == (action == 1), 1.0, -1.0).double()


class ActorCritic(TTModel):
    """Policy and value over one body; returns are discounted inside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.affine, self.action_head, self.value_head = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.affine(x))
        return F.log_softmax(self.action_head(h), -1), self.value_head(h)[..., 0]

    def get_loss(self, batch_data: Any, criterion: Any, device: torch.device) -> Tensor:
        return actor_critic_loss(self, batch_data)

    def get_predictions(self, batch_data: Any, device: torch.device) -> Any:
        state, action, _ = batch_data
        return self(state)[0], action, {}


def actor_critic_loss(model: Any, batch: Any) -> Tensor:
    state, action, reward = batch
    log_probs, values = model(state)
    discount = 0.99 ** torch.arange(5, dtype=torch.float64)
    returns = (reward * discount).flip(1).cumsum(1).flip(1) / discount
    advantage = returns - values.detach()
    policy = -(log_probs.gather(2, action[..., None])[..., 0] * advantage)
    return (policy + F.smooth_l1_loss(values, returns, reduction="none")).mean()


def make_actor_critic(batch: int, shuffle: bool) -> Parts:
    model = ActorCritic().double()
    return Parts(
        model,
        DataLoader(Episodes(), batch_size=batch),
        optim.Adam(model.parameters(), lr=3e-2),
        DataLoader(Episodes(), 1),
    )


classify = plain(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))

test_single, test_ddp = in_all_modes(
    Entry("gat", make_full_graph, plain(full_graph_loss), epochs=8),
    Entry(
        "contrastive",
        make_contrastive,
        plain(lambda model, batch: clip_loss(*model(*batch), model.logit_scale)),
        epochs=3,
    ),
    Entry("several forwards", make_consistency, plain(consistency_loss)),
    Entry(
        "unused parameters",
        make_layer_drop,
        classify,
        epochs=3,
        ddp={"ddp_model_args": {"find_unused_parameters": True}},
    ),
    Entry("nested tensors", make_ragged, classify),
    Entry("actor_critic", make_actor_critic, plain(actor_critic_loss), batch=1, epochs=2),
)
