// SPDX-License-Identifier: Apache-2.0

// A device plugin of GPUs that are not there: device_plugin SOCKET FILE, where FILE has their number.
// A container is told which it has by a variable, as NVIDIA's plugin does.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	devices "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const resource = "nvidia.com/gpu"

type registrar struct {
	registration.UnimplementedRegistrationServer
	socket string
}

func (r registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type:              registration.DevicePlugin,
		Name:              resource,
		Endpoint:          r.socket,
		SupportedVersions: []string{devices.Version},
	}, nil
}

func (registrar) NotifyRegistrationStatus(_ context.Context, status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	log.Print(status)
	return &registration.RegistrationStatusResponse{}, nil
}

type plugin struct {
	devices.UnimplementedDevicePluginServer
	file string
}

func (plugin) GetDevicePluginOptions(context.Context, *devices.Empty) (*devices.DevicePluginOptions, error) {
	return &devices.DevicePluginOptions{}, nil
}

func (p plugin) ListAndWatch(_ *devices.Empty, stream grpc.ServerStreamingServer[devices.ListAndWatchResponse]) error {
	told := -1
	for stream.Context().Err() == nil {
		count := 0
		if text, err := os.ReadFile(p.file); err == nil {
			fmt.Sscan(string(text), &count)
		}
		if count != told {
			found := []*devices.Device{}
			for number := range count {
				found = append(found, &devices.Device{ID: fmt.Sprintf("GPU-%d", number), Health: devices.Healthy})
			}
			if err := stream.Send(&devices.ListAndWatchResponse{Devices: found}); err != nil {
				return err
			}
			told = count
		}
		time.Sleep(200 * time.Millisecond)
	}
	return nil
}

func (plugin) Allocate(_ context.Context, request *devices.AllocateRequest) (*devices.AllocateResponse, error) {
	answer := &devices.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		envs := map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(container.DevicesIds, ",")}
		answer.ContainerResponses = append(answer.ContainerResponses, &devices.ContainerAllocateResponse{Envs: envs})
	}
	return answer, nil
}

func main() {
	socket, file := os.Args[1], os.Args[2]
	listener, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, registrar{socket: socket})
	devices.RegisterDevicePluginServer(server, plugin{file: file})
	log.Fatal(server.Serve(listener))
}
