// The kernels for one instruction set: on vectors of QSDP_LANES lanes, in namespace QSDP_NAMESPACE.
//
// cpu.cpp includes this file once per instruction set, so neither it nor the parts below have an
// include guard. And the parts include nothing: one that two others include would be defined twice,
// and a header of the system would be compiled for this instruction set. Each uses the parts above
// it, and the shared files and system headers that cpu.cpp includes before.

#include "vectors.h"
#include "values.h"
#include "rotation.h"
#include "planes.h"
#include "random.h"
#include "scan.h"
#include "norm.h"
#include "quantize.h"
#include "encode.h"
#include "outputs.h"
#include "decode.h"
#include "changes.h"
#include "update.h"
#include "coded.h"
#include "coded_read.h"
#include "coded_together.h"
#include "coded_rows.h"
