"""REINFORCE: a policy acts step by step, its log-probabilities are kept, and the episode's return decides at the end."""

from itertools import count

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import arguments, save, tell
from torch.distributions import Categorical

#: import memfit


class Walk:
    """Balance a drifting number near zero."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def reset(self):
        self.state, self.time = torch.randn(4, generator=self.generator) * 0.1, 0
        return self.state

    def step(self, action):
        push = torch.tensor([0.0, 0.1, 0.0, -0.05]) * (2 * action - 1)
        self.state = self.state * 1.05 + push + torch.randn(4, generator=self.generator) * 0.02
        self.time += 1
        return self.state, 1.0 - float(self.state.abs().max()), self.time == 12 or bool(self.state.abs().max() > 1)


class Policy(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.affine1, self.dropout = nn.Linear(4, 32 * args.width), nn.Dropout(args.dropout)
        self.affine2 = nn.Linear(32 * args.width, 2)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.dropout(self.affine1(x)))), dim=1)


def select_action(policy, state):
    probs = policy(state.unsqueeze(0))
    m = Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode(policy, optimizer):
    R, returns, policy_loss = 0, [], []
    for r in policy.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    for log_prob, R in zip(policy.saved_log_probs, returns):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]
    return policy_loss


def main():
    args = arguments(__doc__, batch_size=1)
    env, policy = Walk(), Policy(args)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    #: memfit.wrap(policy, optimizer)

    for episode in range(args.steps):
        state = env.reset()
        for _ in count():
            state, reward, done = env.step(select_action(policy, state))
            policy.rewards.append(reward)
            if done:
                break
        tell(episode, finish_episode(policy, optimizer))
    save(args, policy)


if __name__ == "__main__":
    main()
