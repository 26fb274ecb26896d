"""Measures DLFS beside plain files, fio and bare loops on the same disk; see README.md."""
