"""Say the batch you want; memfit fits the training into the memory you have, with the same gradients."""

from memfit._wrap import wrap as wrap
