// Command gpu-plugin is a device plugin for a kubelet of the tests. It offers GPUs that do not exist, as NVIDIA's does
// for real ones, and gives each container an nvidia-smi that names those it got: gpu-plugin COUNT NVIDIA-SMI
package main

import (
	"context"
	"log"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const resource, socket = "nvidia.com/gpu", "tfos-nb-gpu.sock"

type plugin struct {
	api.UnimplementedDevicePluginServer
	count int
	smi   string
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p *plugin) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	devices := make([]*api.Device, p.count)
	for number := range devices {
		devices[number] = &api.Device{ID: strconv.Itoa(number), Health: api.Healthy}
	}
	if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p *plugin) Allocate(_ context.Context, asked *api.AllocateRequest) (*api.AllocateResponse, error) {
	answer := &api.AllocateResponse{}
	for _, container := range asked.ContainerRequests {
		answer.ContainerResponses = append(answer.ContainerResponses, &api.ContainerAllocateResponse{
			Envs:   map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(container.DevicesIds, ",")},
			Mounts: []*api.Mount{{ContainerPath: "/usr/bin/nvidia-smi", HostPath: p.smi, ReadOnly: true}},
		})
	}
	return answer, nil
}

func main() {
	count, err := strconv.Atoi(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	path := filepath.Join(api.DevicePluginPath, socket)
	os.Remove(path)
	listener, err := net.Listen("unix", path)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, &plugin{count: count, smi: os.Args[2]})
	go func() { log.Fatal(server.Serve(listener)) }()
	kubelet, err := grpc.NewClient("unix://"+api.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	request := &api.RegisterRequest{Version: api.Version, Endpoint: socket, ResourceName: resource}
	if _, err := api.NewRegistrationClient(kubelet).Register(context.Background(), request); err != nil {
		log.Fatal(err)
	}
	select {}
}
