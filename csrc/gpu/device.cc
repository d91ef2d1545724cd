// Loads a device library.
#include "gpu/device.h"

#include <dlfcn.h>

#include "base/error.h"

namespace hvpipe {
namespace {

void* Find(const std::string& library, const char* name) {
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  const char* const why = handle == nullptr ? dlerror() : nullptr;
  void* const found = handle == nullptr ? nullptr : dlsym(handle, name);
  if (found != nullptr) return found;
  throw Error("hvpipe's GPU library does not load: install hvpipe again. Received: " +
                  (why != nullptr ? std::string(why) : library + " without " + name),
              ErrorKind::kUsage);
}

}  // namespace

int CountDevices(const std::string& library) {
  return reinterpret_cast<CountDevicesFunction>(Find(library, kCountDevices))();
}

std::unique_ptr<Device> OpenDevice(const std::string& library, int ordinal) {
  const auto open = reinterpret_cast<OpenDeviceFunction>(Find(library, kOpenDevice));
  return std::unique_ptr<Device>(open(ordinal, kDeviceInterface));
}

}  // namespace hvpipe
