/* For NVRTC: printf, assert, size_t, memcpy and their like are built in. */
#pragma once
