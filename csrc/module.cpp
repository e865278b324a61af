#include "module.h"

CP_DISPATCH_MODULE(_C)
