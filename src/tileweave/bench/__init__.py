"""Named cases x operators x peers: correctness first, then time. Needs ``tileweave[cli]``; plots,
``[plot]`` too."""
