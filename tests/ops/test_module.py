"""What the module shows, and its sizes with a loss of K dimensions."""

import torch

import cutefce


def test_a_module_shows_its_options() -> None:
    module = cutefce.LinearCrossEntropyLoss(8, 9, softcap=30.0, z_loss=0.1)
    assert "softcap=30.0" in repr(module) and "z_loss=0.1" in repr(module)
    assert "logit_scale" not in repr(module)


def test_a_module_shows_its_classes_where_its_head_does_not() -> None:
    assert "num_classes=50" in repr(cutefce.LinearCrossEntropyLoss(8, 50, out_features=(3, 2)))


def test_class_weights_of_a_loss_of_k_dimensions_are_those_of_classes() -> None:
    head = cutefce.LinearCrossEntropyLoss(8, 10, out_features=(3,), weight=torch.arange(10.0))
    assert head.linear.weight.shape == (30, 8)
    assert head(torch.randn(4, 8), torch.randint(10, (4, 3))).shape == ()
