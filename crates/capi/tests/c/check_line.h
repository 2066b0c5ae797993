/* An assertion for programs of several threads and processes: names the line, and ends the process without its exit handlers. */
#ifndef CHECK_LINE_H
#define CHECK_LINE_H

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                        \
	do {                                                                                    \
		if (!(condition)) {                                                             \
			printf("line %d: %s (%s)\n", __LINE__, #condition, strerror(errno));    \
			fflush(stdout);                                                         \
			_exit(1);                                                               \
		}                                                                               \
	} while (0)

#endif
