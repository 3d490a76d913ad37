"""The model families that laws and benchmarks run over: random weights, synthetic data, nothing downloaded.

One file per family; `FAMILIES` lists by name those that every law runs over, `MORE` those of which memory is predicted all the
same: their shapes follow from the data, or their gradients are sparse, or they are close to another. `zoo.losses` has other
losses over the same outputs, `zoo.plain` the plain PyTorch that everything is compared with.
"""

from zoo import (
    autoencoder,
    bert,
    convnext,
    dit,
    dlrm,
    frozen,
    gpt,
    hf_gpt2,
    lora,
    lstm,
    mlp,
    moe,
    resnet,
    superres,
    t5,
    unet,
    vit,
)
from zoo.family import Family, first_batch

_ALL = (
    mlp.FAMILY,
    gpt.FAMILY,
    hf_gpt2.FAMILY,
    bert.FAMILY,
    vit.FAMILY,
    t5.FAMILY,
    resnet.FAMILY,
    resnet.WITH_GROUP_NORM,
    convnext.FAMILY,
    unet.FAMILY,
    lstm.FAMILY,
    superres.FAMILY,
    autoencoder.FAMILY,
    frozen.FAMILY,
    lora.FAMILY,
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
MORE: dict[str, Family] = {family.name: family for family in (gpt.UNTIED, moe.FAMILY, dlrm.FAMILY, dit.FAMILY)}

__all__ = ["FAMILIES", "MORE", "Family", "first_batch"]
