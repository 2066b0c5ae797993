/* A program that is built with MemorySanitizer, and a library without it that makes a path and opens it. */
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

int open_a_path_of_its_own(void);

#ifdef LIBRARY
int open_a_path_of_its_own(void)
{
	static const char text[] = "/sys/class/infiniband/anyverbs0/node_type";
	char *path = malloc(sizeof text);
	/* Byte by byte: the sanitizer would see memcpy(3) write. */
	for (size_t n = 0; n < sizeof text; n++)
		((volatile char *)path)[n] = text[n];
	int fd = open(path, O_RDONLY);
	free(path);
	return fd;
}
#else
int main(void)
{
	int fd = open_a_path_of_its_own();
	if (fd < 0)
		return 1;
	return close(fd);
}
#endif
