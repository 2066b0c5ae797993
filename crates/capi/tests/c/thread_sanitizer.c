/* What the compiler of the shared object calls, and this compiler's ThreadSanitizer has under the names of libc only. */
#include <string.h>

void *__tsan_memcpy(void *to, const void *from, size_t count)
{
	return memcpy(to, from, count);
}

void *__tsan_memmove(void *to, const void *from, size_t count)
{
	return memmove(to, from, count);
}

void *__tsan_memset(void *to, int byte, size_t count)
{
	return memset(to, byte, count);
}
