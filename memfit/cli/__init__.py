"""The command line: memfit probe | plan | profile | verify | report | snapshot | demo."""

from memfit.cli.commands import main as main
