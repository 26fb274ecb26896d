"""A volume as a whole: ``volume`` is the API's home, the others change, compare, verify and repair.

``repair`` opens the members that are left, prepares new devices and commits. ``copies`` makes all
copies of the chunks in use equal to the bytes whose checksums are right. ``adoption`` recognises a
member without superblocks, in a volume without replicas.
"""
