/* What the kernel's scheduler says of this process: /proc/PID/task/TID/schedstat (proc_pid_schedstat(5)). */
#include "waited.h"

#include <dirent.h>
#include <stdio.h>

double waited_for_processors(void)
{
	double sum = 0;
	DIR *threads = opendir("/proc/self/task");
	for (struct dirent *entry; threads && (entry = readdir(threads));) {
		char path[300];
		snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", entry->d_name);
		FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "r");
		unsigned long long ran, waited;
		if (file && fscanf(file, "%llu %llu", &ran, &waited) == 2)
			sum += waited / 1e9;
		if (file)
			fclose(file);
	}
	if (threads)
		closedir(threads);
	return sum;
}
