// Lets a copy of this process write the stacks of its Python threads.
#pragma once

#include <chrono>

namespace hvpipe {

// Have a copy of this process handle `signal`. Its handler, Python's faulthandler, writes the stacks of all
// threads to a file. Return whether it ended well in this time.
//
// The handler reads what running threads change, so it crashes now and then. This ends only the copy.
bool HandleInCopy(int signal, std::chrono::milliseconds limit);

}  // namespace hvpipe
