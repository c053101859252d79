"""Talking: start ranks, join a job, cut the world into groups, and move tensors between ranks.

Every byte that a strategy sends passes through `collectives`, is written down in `ledger`,
and can be looked at by the watchdog when somebody waits too long.
"""
