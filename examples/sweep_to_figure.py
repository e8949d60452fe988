"""From a sweep to your own figures, cell by cell.

Open this file in VS Code, Spyder or Jupyter (with jupytext) and run the cells, or run it as a
script. It needs a finished sweep:

    python -m fedbench -m defense=median,flame,baybfed pmr=0.2,0.3,0.5 seed=0,1,2 name=figures
    python examples/sweep_to_figure.py runs/figures

`python -m fedbench.report runs/figures` draws most figures for you. This file is for those that it
does not.
"""

# %% Load the runs: one row per run, every setting and every result is a column
import sys
from pathlib import Path

import matplotlib.pyplot as plt

import fedbench

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/figures")
runs = fedbench.load(folder)
runs = runs[runs.status == "finished"]
print(runs[["defense", "pmr", "seed", "BA", "MA", "TPR", "TNR"]].to_string(index=False))

# %% A table: rates are between 0 and 1
print((100 * runs.pivot_table(index="pmr", columns="defense", values="BA")).round(1))

# %% A figure of the end: points are seeds, lines are means
plt.rcParams.update({"font.size": 8, "pdf.fonttype": 42})  # 42: text in the PDF stays text
figure, axes = plt.subplots(figsize=(3.5, 2.3), layout="constrained")  # inches, one column wide
for defense, chosen in runs.groupby("defense"):
    mean = 100 * chosen.groupby("pmr").BA.mean()
    (line,) = axes.plot(mean.index, mean, linewidth=1, label=defense)
    axes.scatter(chosen.pmr, 100 * chosen.BA, s=9, color=line.get_color())
axes.set(xlabel="share of malicious clients (pmr)", ylabel="backdoor accuracy (%)", ylim=(-4, 104))
axes.legend(frameon=False)
figure.savefig(folder / "ba_by_pmr.pdf")

# %% A figure of the rounds: one row per run and round
rounds = fedbench.load_rounds(folder)
figure, axes = plt.subplots(figsize=(3.5, 2.3), layout="constrained")
highest = rounds[rounds.pmr == rounds.pmr.max()]
(100 * highest.groupby(["round", "defense"]).BA.mean().unstack()).plot(ax=axes)
axes.set(xlabel="round", ylabel=f"BA at pmr {rounds.pmr.max():g} (%)", ylim=(-4, 104))
figure.savefig(folder / "ba_by_round.pdf")

# %% Why was a client rejected? One row per run, round and client
clients = fedbench.load_clients(folder)
print(clients.groupby(["defense", "pmr", "malicious"]).accepted.mean().unstack().round(3))
