"""Plans of divergences of two heads.

problem.py   what they are made for, and the plan
planner.py   the plan of a budget
"""
