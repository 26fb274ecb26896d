"""The order of an epoch.

``options`` has what a caller asks for and the state that resumes an epoch, ``selection`` the
samples that it goes over, ``order`` their permutation, and ``ranks`` this process's share of it.
"""
