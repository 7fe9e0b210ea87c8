"""Flows: products of every operator, and images through a ResNet and a ViT."""

import torch
from torch.nn.functional import cross_entropy

import curvlab
from tests.pretend_device.flow import FLOWS, both, flow, operator, random
from tests.small_problems import resnet, small, vit


def product(kind, build=small, **options):
    def run(device):
        made = operator(device, kind, build, **options)
        return [made @ random(made.n).to(device)]

    return both(run)


for _kind in ("Hessian", "GaussNewton", "FunctionalHessian", "Fisher", "EmpiricalFisher"):
    FLOWS[f"product of {_kind}"] = lambda kind=_kind: product(getattr(curvlab, kind))


@flow
def product_of_a_sampled_Fisher():
    return product(curvlab.Fisher, samples=2, seed=0)


@flow
def product_of_a_block_diagonal():
    def run(device):
        made = curvlab.BlockDiagonal(operator(device))
        return [made @ random(made.n).to(device)]

    return both(run)


@flow
def product_of_a_selection():
    return product(curvlab.Hessian, select="*weight")


@flow
def block_of_products():
    def run(device):
        made = operator(device)
        return [made @ random(5, made.n).to(device)]

    return both(run)


@flow
def average_and_difference():
    def run(device):
        made = operator(device)
        return [(curvlab.average([made, made]) + 0.5 * made) @ random(made.n).to(device)]

    return both(run)


@flow
def projected_operator():
    def run(device):
        made = operator(device)
        basis = curvlab.Basis(made.n, 6, device=device)
        basis.extend(random(3, made.n).to(device))
        return [made.project(basis) @ random(made.n).to(device)]

    return both(run)


@flow
def dense_and_gradient():
    def run(device):
        made = operator(device)
        return [made.dense(), made.gradient()]

    return both(run)


def images(device):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, 3, 32, 32, generator=generator)
    return inputs.to(device), torch.randint(3, (6,), generator=generator).to(device)


def image_product(build, kind):
    def run(device):
        made = kind(build(0).to(device).eval(), cross_entropy, images(device))
        return [made @ random(made.n).to(device)]

    return both(run)


for _name, _build in (("ResNet", resnet), ("ViT", vit)):
    for _kind in (curvlab.Hessian, curvlab.GaussNewton):
        FLOWS[f"{_kind.__name__} product of a {_name}"] = lambda build=_build, kind=_kind: (
            image_product(build, kind)
        )


def image_solve(build):
    def run(device):
        made = curvlab.GaussNewton(build(0).to(device).eval(), cross_entropy, images(device))
        return [curvlab.lanczos(made, k=1, tol=1e-3).values]

    return both(run)


def image_training(build):
    """Three steps of SGD-dagger: two free ones, then one off the eigenvectors found in between."""

    def run(device):
        model, (inputs, targets) = build(0).to(device).eval(), images(device)
        n = curvlab.parameter_count(model)
        basis = curvlab.Basis(n, 2, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        for step in range(3):
            if step == 2:
                made = curvlab.GaussNewton(model, cross_entropy, (inputs, targets))
                basis.extend(curvlab.lanczos(made, k=1, tol=1e-4).vectors)
                curvlab.protect(optimizer, basis, model)
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return [curvlab.parameter_vector(model)]

    return both(run)


for _name, _build in (("ResNet", resnet), ("ViT", vit)):
    FLOWS[f"lanczos of a {_name}"] = lambda build=_build: image_solve(build)
    FLOWS[f"SGD-dagger on a {_name}"] = lambda build=_build: image_training(build)
