"""Ways to store matrices other than as their elements, one file each; what they share is `weights.encoding`."""
