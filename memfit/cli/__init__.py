"""The command line: memfit probe | plan | verify | report | demo."""

from memfit.cli.commands import main as main
