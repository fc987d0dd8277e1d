"""Proof by faults: past bugs, put back one at a time, each of which some test must notice.

catalogue.txt       the faults, as edits of today's sources; catalogue.py reads them
__main__.py         puts each into a copy of the checkout and runs tests there
noticed.json        which tests noticed which fault, as the last run found
test_catalogue.py   whether the edits fit the sources and are in that file
"""
