"""Folders of transformers' own architectures in tiny configurations, as ``save_pretrained`` writes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def tiny_electra(folder: Path, words: Iterable[str], width: int = 16, **options: Any) -> None:
    """An untrained model for texts of these words, with its tokenizer; further options are its configuration's."""
    import transformers

    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    config = transformers.ElectraConfig(
        vocab_size=len(tokenizer),
        embedding_size=width,
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * width,
        **options,
    )
    transformers.ElectraForSequenceClassification(config).save_pretrained(folder)


def tiny_vit(folder: Path) -> Any:
    """An untrained model for pictures of 16 by 16; returns it, too."""
    import transformers

    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.ViTForImageClassification(config)
    model.save_pretrained(folder)
    return model
