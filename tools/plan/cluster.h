/* cluster.h - described hardware: what a node is, and the rates of its links. Pure numbers. */
#ifndef PLAN_CLUSTER_H
#define PLAN_CLUSTER_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Rates are of payload, in bytes per second and per direction; 0: so fast that it takes no
 * time. All nodes are alike, and all GPUs. */
typedef struct plan_cluster {
    double n_nodes, gpus_per_node;
    double gpu_memory_bytes, host_memory_bytes; /* of a GPU; of a node */
    double flops;                               /* that a GPU reaches in a layer, per second */
    double memory_rate;                         /* of a GPU's own memory */
    double pcie_rate;                           /* of each GPU, each way */
    double host_rate;                           /* that the copies of a node's GPUs reach together */
    double node_rate;                           /* of each GPU to the others of its node, each way */
    double inter_rate;                          /* of a node, each way */
    double burst_bytes;                         /* that a shaped link lets pass at once after a pause */
    /* A collective over gloo holds a node's link so many times as long as its bytes take: a ring of all
     * ranks, and rings of those with the same local index. Measured; 0: once. */
    double gather_times, reduce_times, lane_gather_times, lane_reduce_times;
    /* What a node sends beside the bytes of collectives, over gloo and TCP: of each message what announces
     * it, of each packet headers and an acknowledgement; and a packet's largest payload. 0: not counted. */
    double message_bytes, packet_bytes, packet_payload;
    double file_rate;   /* of a node's disk; 0: there is none */
    double cpu_rate;    /* bytes of optimizer state per second and node, on CPUs */
    double reduce_rate; /* as node_rate, of what a reduction sends and adds up; 0: as node_rate */
    double speed;       /* of computing, in that of the machine that a job was measured on; 0: the same */
    double node_latency_s, inter_latency_s; /* of one hop of a collective */
    bool trees; /* collectives of one rank per node take log2 hops, and not one for each node */
} plan_cluster;

static inline double plan_n_gpus(const plan_cluster *cluster) {
    return cluster->n_nodes * cluster->gpus_per_node;
}

/* That a GPU has, when all of its node copy at once. */
static inline double plan_copy_rate(const plan_cluster *cluster) {
    double share = cluster->host_rate / cluster->gpus_per_node;
    return share > 0 && (cluster->pcie_rate <= 0 || share < cluster->pcie_rate) ? share : cluster->pcie_rate;
}

/* Hops of a collective of one rank per node: one way. */
static inline double plan_node_hops(const plan_cluster *cluster) {
    return cluster->trees ? ceil(log2(cluster->n_nodes)) : cluster->n_nodes - 1;
}

/* Seconds that `bytes` take at `rate`. */
static inline double plan_seconds(double bytes, double rate) {
    return rate > 0 ? bytes / rate : 0;
}

/* What took so long where it was measured takes so long here. */
static inline double plan_measured(const plan_cluster *cluster, double seconds) {
    return cluster->speed > 0 ? seconds / cluster->speed : seconds;
}

#endif
