"""Eigensolvers compared on one operator: ``curvlab bench eig``, and curvlab's own benchmarks.

    problem.py     what is solved: an operator, how it is made, what one gradient costs
    solvers.py     who solves: curvlab, SciPy, PRIMME, other tools, a user's own function
    peers/         thin adapters to other tools
    gate.py        who is right: the wanted values, true residuals
    contest.py     who is fast: rounds, threads, set-up
    leaderboard.py what came out, as JSON lines that can be merged, a table and a picture
    timing.py      how time is taken

:mod:`curvlab.bench.timing` depends on nothing else here: the guard of ``python -m benchmarks
compare`` also runs on older revisions.
"""
