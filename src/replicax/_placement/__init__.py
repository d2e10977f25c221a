"""Which part of which array lies on which device, as data, text and pictures: `Strategy.visualize` and `show`."""
