// TensorFlow's element types as the engine names them.
#pragma once

#include "base/dtype.h"
#include "tensorflow/core/framework/types.h"

namespace hvpipe {

// Of the types that the ops are registered for.
inline DType EngineType(tensorflow::DataType type) {
  switch (type) {
    case tensorflow::DT_BOOL:
      return DType::kBool;
    case tensorflow::DT_UINT8:
      return DType::kUint8;
    case tensorflow::DT_INT8:
      return DType::kInt8;
    case tensorflow::DT_UINT16:
      return DType::kUint16;
    case tensorflow::DT_INT16:
      return DType::kInt16;
    case tensorflow::DT_INT32:
      return DType::kInt32;
    case tensorflow::DT_INT64:
      return DType::kInt64;
    case tensorflow::DT_HALF:
      return DType::kFloat16;
    case tensorflow::DT_BFLOAT16:
      return DType::kBFloat16;
    case tensorflow::DT_DOUBLE:
      return DType::kFloat64;
    default:
      return DType::kFloat32;
  }
}

}  // namespace hvpipe
