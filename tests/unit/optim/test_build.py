import pytest
import torch
from torch import nn

from torchtrain.config.optimization import OptimizerConfig
from torchtrain.errors import ConfigError
from torchtrain.optim.build import build_optimizer, check_optimizer

CPU = torch.device("cpu")


class TinyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.proj = nn.Linear(4, 4)
        self.norm = nn.RMSNorm(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


class TakesAnything(torch.optim.Optimizer):
    def __init__(self, params, **kwargs):
        super().__init__(params, kwargs)


def fqns_of(model, group):
    return {fqn for fqn, p in model.named_parameters() for q in group["params"] if p is q}


def test_groups_cover_trainable_parameters_once_and_split_by_decay():
    model = TinyModel()
    optimizer = build_optimizer(model, OptimizerConfig(), device=CPU)
    decay, no_decay = optimizer.param_groups
    assert fqns_of(model, decay) == {"embed.weight", "proj.weight"}
    assert decay["weight_decay"] == 0.1
    assert fqns_of(model, no_decay) == {"proj.bias", "norm.weight"}
    assert no_decay["weight_decay"] == 0.0
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


def test_a_group_that_would_be_empty_is_left_out():
    assert len(build_optimizer(nn.Linear(2, 2, bias=False), OptimizerConfig(), device=CPU).param_groups) == 1


def test_defaults_become_adamw_with_the_fused_kernel_of_the_device():
    optimizer = build_optimizer(TinyModel(), OptimizerConfig(), device=CPU)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["betas"] == (0.9, 0.95)
    assert optimizer.defaults["fused"] is True


def test_fused_steps_equal_unfused_steps():
    weights = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = build_optimizer(model, OptimizerConfig(fused=fused, lr=1e-2), device=CPU)
        for _ in range(3):
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-7)


def test_defaults_that_a_class_does_not_take_are_left_out_and_options_are_passed():
    config = OptimizerConfig(target="torch.optim.SGD", options={"momentum": 0.9})
    optimizer = build_optimizer(TinyModel(), config, device=CPU)
    assert optimizer.defaults["momentum"] == 0.9
    assert optimizer.defaults["weight_decay"] == 0.1


def test_every_setting_that_the_class_cannot_take_is_an_error():
    config = OptimizerConfig(
        target="torch.optim.SGD", betas=(0.8, 0.9), options={"momentun": 0.9, "lr": 1.0}, no_decay=("*nrm.weight",)
    )
    with pytest.raises(ConfigError) as caught:
        build_optimizer(TinyModel(), config, device=CPU)
    assert [fault.path for fault in caught.value.faults] == [
        "optimizer.betas",
        "optimizer.options.momentun",
        "optimizer.options.lr",
        "optimizer.no_decay",
    ]
    assert 'did you mean "momentum"?' in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (OptimizerConfig(options={"momentum": 0.9}), "optimizer.options.momentum"),
        (OptimizerConfig(options={"params": []}), "optimizer.options.params = []: is not an extra option; remove it"),
        (OptimizerConfig(no_decay=("*nrm.weight",)), "optimizer.no_decay"),
        (OptimizerConfig(target="torch.optim.AdmW"), "did you mean torch.optim.AdamW?"),
        (OptimizerConfig(lr=-1.0), "Invalid learning rate"),
        (OptimizerConfig(target="torch.optim.SGD", betas=(0.9, 0.99)), "optimizer.betas"),
    ],
)
def test_the_meta_model_is_enough_to_refuse_a_wrong_optimizer(config, said):
    with pytest.raises(ConfigError) as caught:
        check_optimizer(TinyModel().to("meta"), config)
    assert said in str(caught.value)
    assert len(caught.value.faults) == 1


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(),
        OptimizerConfig(fused=True),
        OptimizerConfig(fp32_main_params=True),
        OptimizerConfig(target="torch.optim.SGD", options={"momentum": 0.9}),
    ],
)
def test_the_meta_model_passes_a_right_optimizer(config):
    check_optimizer(TinyModel().to("meta"), config)


def test_a_value_that_the_class_refuses_is_a_config_error():
    with pytest.raises(ConfigError, match="Invalid learning rate"):
        build_optimizer(TinyModel(), OptimizerConfig(lr=-1.0), device=CPU)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("os.system", "must be a class under torchtrain., torch.optim. or one of trusted_targets"),
        ("torch.optimum.AdamW", "must be a class under"),
        ("AdamW", "must be a dotted class name"),
        ("torch.optim.AdmW", "did you mean torch.optim.AdamW?"),
        ("torch.optim.lr_scheduler.LambdaLR", "must name an optimizer class"),
        ("torch.optim.lr_scheduler", "must name an optimizer class"),
        ("torch.optim.nothing.AdamW", "must be importable"),
        ("torchtrain.optim.build.build_optimizer", "must name an optimizer class"),
    ],
)
def test_a_target_that_is_no_trusted_optimizer_is_refused(target, message):
    with pytest.raises(ConfigError) as caught:
        build_optimizer(TinyModel(), OptimizerConfig(target=target), device=CPU)
    assert message in str(caught.value)


def test_trusted_prefixes_open_other_packages_and_only_whole_names_of_them():
    config = OptimizerConfig(target=f"{__name__}.TakesAnything", options={"trust": 1e-3})
    optimizer = build_optimizer(TinyModel(), config, device=CPU, trusted_targets=("tests",))
    assert optimizer.defaults["trust"] == 1e-3
    with pytest.raises(ConfigError):
        build_optimizer(TinyModel(), config, device=CPU, trusted_targets=("test",))
