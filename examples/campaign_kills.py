"""Kill real workers 200 times at random moments, with an S3 server behind a proxy that fails 5 % of all requests.

`python examples/campaign_kills.py [KILLS] [SEED]` plays runs from nothing, planning included, in worlds of 1, 2 and 3
ranks with a tiny model, until SIGKILL has ended KILLS processes. Every run has to end with the bits of an undisturbed
one, and with at most two evaluations lost per kill. Needs the `test` extra.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def main() -> None:
    """Run the campaign and print what happened."""
    from support.campaign import campaign
    from support.models import save_tiny_model
    from support.runs import make_quiet_run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", nargs="?", type=int, default=200)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        quiet = make_quiet_run(folder, save_tiny_model(folder / "model"), num_documents=300)
        tally = campaign(folder / "campaign", quiet, kills=arguments.kills, seed=arguments.seed)
    print(
        f"{tally.kills} of {tally.incarnations} processes killed in {tally.runs} runs of {quiet.num_chunks} chunks; "
        f"every run ended with the bits of the undisturbed one\n"
        f"{tally.lost} of {tally.evaluations} evaluations lost: {tally.lost / tally.kills:.2f} a kill, 2 are allowed\n"
        f"{tally.faults} of {tally.requests} requests failed ({tally.faults / tally.requests:.1%}); "
        f"{tally.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
