"""A loop of your own: a GAN that learns to draw a circle. Alone, `evenstep run --devices 2`, or under torchrun."""

import torch
from torch import nn
from torch.nn import functional as F

import evenstep

team = evenstep.join(seed=1)
circle = torch.view_as_real(torch.polar(torch.ones(2048), torch.linspace(0, 6.28, 2048)))


def draw(generator, points):
    return generator(torch.randn(len(points), 8, device=points.device))


def discriminator_loss(models, points):
    discriminator, generator = models
    return F.softplus(-discriminator(points)).mean() + F.softplus(discriminator(draw(generator, points))).mean()


def generator_loss(models, points):
    generator, discriminator = models
    return F.softplus(-discriminator(draw(generator, points))).mean()


g = team.wrap(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)))
d = team.wrap(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1)))
g_adam, d_adam = (torch.optim.Adam(one.parameters(), lr=3e-3, betas=(0.5, 0.99)) for one in (g, d))
loader = team.loader(circle, batch=256)  # over all devices together
for _ in range(150):
    for batch in loader:  # of two models the first is trained, the other is at hand
        team.backward(discriminator_loss, (d, g), batch)
        team.step(d_adam)
        team.backward(generator_loss, (g, d), batch)
        team.step(g_adam, clip=1.0)
drawn = team.evaluate(lambda model, points: {"radius": draw(model, points).norm(dim=1)}, g, loader)
if team.world.is_main:
    print(f"mean radius {drawn['radius']:.2f} (the circle's is 1)")
