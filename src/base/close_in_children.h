// Descriptors that a forked child closes at once.
//
// A child that a framework forks (a data loader's worker) would hold this process's sockets open: peers would not hear of
// its end while a child lives, and a port would stay taken.
#pragma once

namespace paceline {

/// From now on; children that are forked by clone() or vfork() without the C library's fork() are not reached.
void close_in_children(int fd);
/// Before it is closed here, or the number would mean something else.
void keep_in_children(int fd);

}  // namespace paceline
