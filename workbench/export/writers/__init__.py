"""The formats that are written: each turns a selection into file maps, and moves no byte."""
